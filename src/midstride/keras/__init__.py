"""Keras 3's models, layers, optimizers, metrics and variables as parts of a state. Imported when one is first seen."""
