"""The specification in float64: short, slow, and sharing no code with what it judges."""
