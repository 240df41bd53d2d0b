"""One optimizer step: gradients in, the update beside forward and backward, commit or rollback, writes beside it."""
