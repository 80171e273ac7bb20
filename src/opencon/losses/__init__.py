"""Losses as pure functions of tensors: no state, no configuration, no knowledge of any method."""
