"""Images in, batches out: where images come from, which of them keep their label, and how they reach the device."""
