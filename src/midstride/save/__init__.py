"""The way out, in order: capture, plan, stage, write, commit, retire."""
