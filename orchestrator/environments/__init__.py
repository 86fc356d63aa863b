"""Environments that ship with composer-prime. Each loads by its module path as a verifiers plugin id.

toolsmith      the quickstart task set: tools under drawn names, one to three calls, a verified answer
reasoning_gym  procedurally generated reasoning tasks, one model turn each
tool_loop      an in-process harness: chat turns over the interception endpoint, with the tools run here
"""
