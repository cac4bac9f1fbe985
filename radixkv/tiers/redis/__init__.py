"""The Redis tier: blocks that several replicas share."""
