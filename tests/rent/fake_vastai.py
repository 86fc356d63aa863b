"""A stand-in for the command `vastai`: it keeps offers and instances in a JSON file and records every call.

It answers in the form of the real command with --raw (vast-ai/vast-cli at 5567983): rows on stdout, and an HTTP error
as {"error": true, ...} on stderr with exit status 0. Written to a folder on PATH by the tests; imports nothing of ours.
"""

import json
import os
import sys
from pathlib import Path

state_path = Path(os.environ["FAKE_VASTAI"])
state = json.loads(state_path.read_text())
words = sys.argv[1:]
kind = words[:2]
state["calls"].append({"words": words, "stdin": "" if sys.stdin.isatty() else sys.stdin.read()})
answer = None
error = None

if not state["key"]:
    error = {"error": True, "status_code": 401, "msg": "This action requires login"}
elif kind == ["search", "offers"]:
    answer = state["offers"]
elif kind == ["create", "instance"]:
    offer = next((row for row in state["offers"] if str(row["id"]) == words[2]), None)
    if offer is None or offer["id"] in state["refused"]:
        error = {
            "error": True,
            "status_code": 410,
            "msg": f"error 404/3603: no_such_ask Instance type by id {words[2]}",
        }
    else:
        number = 9000 + len(state["instances"])
        label = words[words.index("--label") + 1]
        state["instances"].append(
            {"id": number, "label": label, "actual_status": "loading", "dph_total": offer["dph_total"]}
        )
        answer = {"success": True, "new_contract": number}
elif kind == ["show", "instances"]:
    answer = state["instances"]
elif kind == ["destroy", "instance"]:
    if words[2] in state["stuck"]:
        state["stuck"].remove(words[2])
        error = {"error": True, "status_code": 502, "msg": "Bad gateway"}
    else:
        state["instances"] = [row for row in state["instances"] if str(row["id"]) != words[2]]
        answer = {"success": True}

state_path.write_text(json.dumps(state))
if kind == ["create", "instance"] and state["killed"] and answer:
    sys.exit(137)  # the instance exists, but its answer is lost
print(json.dumps(error), file=sys.stderr) if error else print(json.dumps(answer, indent=1, sort_keys=True))
