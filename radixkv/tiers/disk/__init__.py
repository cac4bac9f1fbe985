"""The disk tier: blocks in append-only files, which outlive the process."""
