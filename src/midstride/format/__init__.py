"""Bytes and their meaning on disk. Pure: no input or output, no clock, no framework."""
