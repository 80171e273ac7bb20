"""What a run looks like to a person: figures."""
