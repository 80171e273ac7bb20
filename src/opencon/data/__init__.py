"""Images in, batches out: where images come from, which of them keep their label, and how they reach the device."""

from opencon.data import catalog  # noqa: F401 (adds its data sets to DATASETS, whichever part of the room is entered first)
