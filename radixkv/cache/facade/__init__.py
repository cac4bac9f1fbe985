"""What the facade hands its calls to: each with one part of what users may ask of a cache."""
