"""The way in, in order: find, verify the manifest, plan, read and check, put back."""
