"""One optimizer step: from gradients through the update to commit or rollback; also writes outside of steps."""
