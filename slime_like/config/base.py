"""What every section of the configuration shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section refuses keys it does not know, converts nothing silently, and cannot be changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True, protected_namespaces=())
