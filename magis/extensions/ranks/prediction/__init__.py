"""Peaks and times of ranks without hardware: fake runs, named terms, assumptions."""
