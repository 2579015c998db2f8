"""Encodes images for engines: `images` decodes files, `image_encoder` has the tower, `server` serves clients."""
