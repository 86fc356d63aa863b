"""The targets of the SDPO loss: detect turns that went wrong, write a hint, and place it before the turn.

    group ended --> detect.py (rules, judge)                  --> ErrorTurns
                --> generate.py (layers, tried in order)      --> the hint's text
                --> placement.py (the sample's own ids, the hint's between two of them) --> HintedTurn
                --> Sample.distillations

Read stage.py first. An error message answers a turn. The turn that went wrong is the assistant turn before it, and the
hint goes before that turn. A failure in here costs a hint, never a rollout, and is counted.

Cursor published (Composer 2.5) that feedback targets the message that went wrong, with a reminder of the available
tools as the example. How hints are made is not published; the layers are this project's own. SDPO (arXiv 2601.20802)
and OPSD (2601.18734) put feedback before the whole answer and distill all of it. Here only the turn is distilled.
"""
