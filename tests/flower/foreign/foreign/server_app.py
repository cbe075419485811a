"""Asks all SuperNodes that are there, and writes what they say."""

import json
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Send the code's question to every client."""
    where = ConfigRecord({"folder": context.run_config["folder"]})
    messages = [Message(RecordDict({"where": where}), node, "query") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=120)
    found = {
        str(m.metadata.src_node_id): {"error": str(m.error)} if m.has_error() else dict(m.content["found"])
        for m in replies
    }
    Path(str(context.run_config["out"])).write_text(json.dumps(found))
