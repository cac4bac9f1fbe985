"""The model side of a step: weights, paged K/V tensors, attention hook, sampling. torch lives here."""
