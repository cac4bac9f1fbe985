"""Routes that belong to no dialect: health, version, models, tokenisation."""
