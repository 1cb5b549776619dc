"""The pytest plugin: options, collection of matrices, outcomes."""
