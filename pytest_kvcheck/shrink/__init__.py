"""From a failing run to the smallest program that still fails."""
