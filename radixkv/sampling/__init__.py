"""From logits to tokens: penalties, masks, random streams, log probabilities."""
