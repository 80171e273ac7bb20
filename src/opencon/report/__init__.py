"""What people see: figures of a run, the page of a discovery, the table of photos, the model card."""
