"""TensorFlow's sessions, savers and variables. Imported only by those who use it."""
