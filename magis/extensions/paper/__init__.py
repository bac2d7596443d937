"""The method of the paper as published: F-Tree, mutations, incremental scheduling, coordinated search."""
