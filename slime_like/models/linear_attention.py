"""Sizes of layers with linear attention."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Layers with gated delta nets (arXiv:2412.06464) instead of attention.

    Attributes:
        layers: their indices in the model.
        num_key_heads, num_value_heads: consecutive value heads share a query and key head.
        key_dim, value_dim: sizes of a head.
        conv_width: tokens that the convolution over queries, keys and values sees.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        """Columns of all keys, or all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all values, and of their gates."""
        return self.num_value_heads * self.value_dim

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names that conversion rules use."""
        return {
            "linear_key_heads": self.num_key_heads,
            "linear_heads": self.num_value_heads,
            "linear_head": self.value_dim,
            "linear_key": self.keys,
            "linear_value": self.values,
            "linear_mixed": 2 * self.keys + self.values,
            "linear_qkvz": 2 * (self.keys + self.values),
            "linear_ba": 2 * self.num_value_heads,
            "linear_width": self.conv_width,
        }

    def matrices(self, hidden_size: int) -> int:
        """Return the elements of all layers' projections: queries, keys, values, gates, decays, steps and outputs."""
        return len(self.layers) * hidden_size * (2 * self.keys + 3 * self.values + 2 * self.num_value_heads)

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes that an engine keeps for one sequence: states in float32, and the convolution's inputs."""
        states = 4 * self.num_value_heads * self.key_dim * self.value_dim
        return len(self.layers) * (states + (self.conv_width - 1) * (2 * self.keys + self.values) * element_bytes)

    @property
    def vectors(self) -> int:
        """Elements of all layers' convolutions, norms, and decays' parameters."""
        convolution = self.conv_width * (2 * self.keys + self.values)
        return len(self.layers) * (convolution + 2 * self.num_value_heads + self.value_dim)
