"""The method of the paper as it was published: F-Tree, mutations, incremental scheduling, coordinated search."""
