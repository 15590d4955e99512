"""A plan in words, imported when a plan is printed.

What enters: a plan. What leaves: text for people; nothing is decided.

`plan_text` is the whole plan. `headlines` is its first line; `held_text` is what each device holds; `sections` are
about stages and kernels; `strictness` is what `strict=True` refuses; `advice` says what to do about work that stays on
one device; `plan_comparison` says what is different in another plan.
"""
