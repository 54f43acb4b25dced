"""A model on disk: configuration, dimensions, weight files. An import of any module registers all model families."""

import slime_like.models.families  # noqa: F401
