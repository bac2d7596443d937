"""Functions for users' own loops: `magis.optimize`, `magis.fit`, `magis.estimate`, `magis.peak`, operator profiles."""
