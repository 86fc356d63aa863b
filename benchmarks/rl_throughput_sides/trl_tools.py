"""toolsmith's episodes as TRL environments: the same prompts and, as far as TRL's tool loop allows, the same replies.

TRL takes an environment's methods as tools and renders their JSON schemas from docstrings and type hints. One class is
made for each task, with methods of the drawn names. Three things need care:

1. Schemas. TRL's have a description for every parameter, ours have none. The chat template that TRL gets here prints
   tools in our form; parameter types travel in the descriptions.
2. Types. TRL casts arguments to the schema's types before the call ("7" becomes 7), so a wrong type would never be an
   error. The hints are therefore `Any`, and the method checks the model's text, as ours does.
3. Arguments. A method takes any keyword argument, so missing and unknown ones get toolsmith's error texts.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from orchestrator.environments.toolsmith.taskset import Episode, Tool, run_call

_TOOL = "{{- tool | tojson }}"
_TOOL_IN_OUR_FORM = """\
{%- set function = tool.function %}
        {{- '{"type": "function", "function": {"name": "' + function.name + '", "description": "' }}
        {{- function.description + '", "parameters": {"type": "object", "properties": {' }}
        {%- for name, property in function.parameters.properties.items() %}
            {{- '"' + name + '": {"type": "' + property.description + '"}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- '}, "required": ' + function.parameters.required | tojson + '}}}' }}"""

NOTES = (
    "TRL answers a call of an unknown tool with \"{'error': 'Tool x not found.'}\", we with \"Tool not found: x\"",
    "TRL ends the conversation at a call that is no valid JSON; ours answers it with an error turn",
    "TRL cuts a conversation whose tool replies would pass max_completion_length; ours ends it at model.max_context",
    "TRL is synchronous: it trains on rollouts of its newest weights; ours may lag by max_staleness = 1 version",
)
"""What cannot be made the same through TRL's public interface."""


def template_for_trl(template: str) -> str:
    """The model's chat template, but printing TRL's tool schemas as toolsmith's. Raises ValueError."""
    if template.count(_TOOL) != 1:
        raise ValueError(f"the chat template must print each tool with {_TOOL!r}; it does not")
    return template.replace(_TOOL, _TOOL_IN_OUR_FORM)


def environment_class(episode: Episode) -> type:
    """An environment with the episode's tools as methods, in the form of TRL's environment_factory."""
    # TRL lists members by attribute, in alphabetical order, and names tools by __name__.
    methods = {f"tool_{index}": _method(episode, tool) for index, tool in enumerate(episode.tools)}
    return type("Toolsmith", (), {"reset": _reset, **methods})


def _reset(self: Any, **_: Any) -> None:
    """Episodes have no state."""


def _method(episode: Episode, tool: Tool) -> Callable[..., str]:
    def method(self: Any, /, **arguments: Any) -> str:
        return run_call(episode, tool.name, json.dumps(arguments))

    description = tool.schema()["function"]["description"]
    lines = [f"    {name}: {tool.argument_type}" for name in tool.arguments]
    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = "\n".join([description, "", "Args:", *lines])
    method.__annotations__ = dict.fromkeys(tool.arguments, Any)
    positional = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Any) for name in tool.arguments]
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *positional]
    )
    return method
