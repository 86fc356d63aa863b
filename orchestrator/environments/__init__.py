"""Environments that ship with composer-prime, each one loadable by its module path as a verifiers plugin id.

toolsmith   the quickstart task set: tools under drawn names, one to three calls, a verified answer
tool_loop   an in-process harness: chat turns over the interception endpoint, tools run here
"""
