"""Views: a placement, a timeline or a layout as a page, a picture, a table or text.

What enters: placements and timelines, which know none of this; variables and tensors, for their layouts. What leaves:
files, or text for a terminal.
"""
