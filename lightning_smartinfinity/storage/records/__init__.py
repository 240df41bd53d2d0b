"""What a step leaves beside the state: the record of the training and the residual of compressed gradients."""
