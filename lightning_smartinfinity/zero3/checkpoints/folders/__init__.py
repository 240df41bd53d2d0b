"""The folder of a save in progress: staging, the parts of several machines, and the swap that completes it."""
