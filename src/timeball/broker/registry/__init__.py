"""The registry: which topics, groups, offsets and request modes there are."""
