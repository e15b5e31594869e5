"""The formulas of the torch rooms, compiled: plain functions of one run or one instance over the compact geometry of its layout."""
