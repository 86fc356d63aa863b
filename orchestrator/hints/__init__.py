"""Channel 2's targets: which turns went wrong, what would have helped, and the same turn after a context that says so.

    group ended --> detect (rules, judge) --> error turns --> layers (template, raw error, model, sibling) --> hint text
                --> placement: the sample's own ids up to the turn, the hint's ids between two of them, the turn's ids
                --> Sample.distillations

Read stage.py first. An error message answers a turn: the turn that went wrong is the assistant turn before it, and the
hint goes before that turn. What goes wrong here costs a hint, never a rollout, and is counted.

Published by Cursor (Composer 2.5): targeted feedback at the message that went wrong, and the reminder of the available
tools as an example. How hints are made is not published; the layers are this project's own. SDPO (arXiv 2601.20802) and
OPSD (2601.18734) put feedback before the whole answer and distil all of it; here only the turn is distilled.
"""
