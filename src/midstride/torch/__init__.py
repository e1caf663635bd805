"""PyTorch's tensors, modules and optimizers as parts of a state. Imported when one is first seen."""
