"""The APIs that clients speak: one folder for each dialect."""
