"""The rules themselves, by family.

What enters: one `Op`. What leaves: its `Factors`, or `Declined` with a reason. A family's module registers its
functions when it is imported; `rules` imports all of them.
"""
