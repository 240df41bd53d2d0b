"""A save's folder while it is written: staging, the parts of several machines, and the swap that completes it."""
