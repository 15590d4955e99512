"""Files: written whole or not at all; SavedModels found, checked and read.

What enters: paths, and what is to be written. What leaves: files that are ours, by a mark, and errors that say what
is wrong with files that are not.
"""
