"""A plan in words.

What enters: a plan, and how much of the work runs where (`shares`). What leaves: text for people; nothing is decided.

`plan_text` is the whole plan. `headlines` is its first line; `stage_texts` and `kernels_text` say what they are
called after; `advice` says what to do about work that stays on one device; `plan_comparison` says what is
different in another plan.
"""
