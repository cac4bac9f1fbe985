"""Several engines with one model, as one: routed by what they hold, each replaceable while requests run."""
