"""
A W&B server in memory with as much as its client needs: log in, create and resume runs, receive
rows, files and artifacts.
"""
import base64
import gzip
import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """
    The server runs in a thread. Tests read and set these fields:

    runs: {id: {"history": [row, ...], "output": [line of the console, ...],
                "exit": code or None, "name": ..., "config": {...}}}
    uploads: {path: bytes}
    artifacts: [input of createArtifact]
    keys: the API keys received
    operations: names of the GraphQL operations, in order
    sweep: text of the sweep that was created
    trials: [(run id, {setting: value})] for the sweep's agent
    fault: the answer from now on to requests whose path contains `faulty`: a status, or bytes with
        status 200; None: the server works
    proxied: whether any request for http://wandb.test arrived
    speed: rate at which uploads of files are received, in bytes per second; 0: they stall; None: no
        limit
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        # A small buffer, because what waits in it counts as sent.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs, self.uploads, self.artifacts, self.keys, self.operations = {}, {}, [], set(), []
        self.sweep, self.trials, self.speed, self.proxied = None, [], None, False
        self.fault, self.faulty = None, ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # the client has closed the connection

    def stop(self):
        self.shutdown()
        self.server_close()

    def stream(self, run_id, body):
        """
        Store a piece of a run: lines of the history or the console at their place in the file, or
        the exit code.
        """
        run = self.run(run_id)
        for name, chunk in (body.get("files") or {}).items():
            if kind := {"wandb-history.jsonl": "history", "output.log": "output"}.get(name):
                lines = [json.loads(line) if kind == "history" else line
                         for line in chunk["content"]]
                run[kind][chunk["offset"]:chunk["offset"] + len(lines)] = lines
        if body.get("complete"):
            run["exit"] = body["exitcode"]

    def run(self, run_id):
        return self.runs.setdefault(
            run_id, {"history": [], "output": [], "exit": None, "config": {}})

    def graphql(self, operation, v):
        answer = getattr(self, operation, lambda v: {})
        return answer(v)

    def Viewer(self, v):
        return {"viewer": {"id": "u", "username": "me", "entity": "me", "teams": {"edges": []},
                           "flags": "{}", "email": "", "admin": False},
                "serverInfo": {"cliVersionInfo": {"max_cli_version": "0.99.0"}}}

    def RunResumeStatus(self, v):
        run, bucket = self.runs.get(v["name"]), None
        if run:
            last = run["history"][-1:]
            bucket = {
                "name": v["name"], "id": "R", "summaryMetrics": json.dumps(last[0] if last else {}),
                "displayName": None, "logLineCount": len(run["output"]),
                "historyLineCount": len(run["history"]), "eventsLineCount": 0,
                "historyTail": json.dumps([json.dumps(row) for row in last]), "eventsTail": "[]",
                "logTail": "[]", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}'}
        return {"model": {"id": "p", "name": v["project"], "entity": {"id": "e", "name": "me"},
                          "bucket": bucket}}

    def GetDefaultEntity(self, v):
        return {"viewer": {"__typename": "User", "id": "u", "entity": "me"}}

    def Run(self, v):
        run = self.runs.get(v["name"])
        last = run["history"][-1]["_step"] if run and run["history"] else -1
        found = {
            "id": "R", "projectId": "1", "tags": [], "name": v["name"], "displayName": None,
            "state": "finished", "config": "{}", "summaryMetrics": "{}", "systemMetrics": "{}",
            "user": {"name": "me", "username": "me"}, "sweepName": None
        } if run else None
        if run:
            found |= {"historyLineCount": len(run["history"]), "historyKeys": {"lastStep": last}}
        return {"project": {"run": found}}

    def UpsertBucket(self, v):
        run = self.run(v["name"])
        run["config"] |= json.loads(v.get("config") or "{}")
        run["name"] = v.get("displayName") or run.get("name")
        project = {"id": "p", "name": v.get("project") or "p", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "R", "name": v["name"], "displayName": run["name"], "description": None,
                  "config": "{}", "sweepName": None, "historyLineCount": len(run["history"]),
                  "project": project}
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def UpsertSweep(self, v):
        self.sweep = v["config"]
        return {"upsertSweep": {
            "sweep": {"name": "sweep1",
                      "project": {"id": "p", "name": v["projectName"] or "llamac",
                                  "entity": {"id": "e", "name": "me"}}},
            "configValidationWarnings": []}}

    def SweepWithRuns(self, v):
        return {"project": {"sweep": {"id": "S", "name": v["sweep"], "config": self.sweep,
                                      "runs": {"edges": []}}}}

    def CreateAgent(self, v):
        return {"createAgent": {"agent": {"id": "agent1"}}}

    def GetSweepState(self, v):
        return {"project": {"sweep": {"state": "RUNNING"}}}

    def Heartbeat(self, v):
        if json.loads(v["runState"]):
            commands = []  # trials run one after the other
        elif self.trials:
            name, arguments = self.trials.pop(0)
            program = re.search(r"(?m)^program: (.*)$", self.sweep)[1]
            commands = [{"type": "run", "run_id": name, "program": program,
                         "args": {k: {"value": x} for k, x in arguments.items()}}]
        else:
            commands = [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": v["id"]}, "commands": json.dumps(commands)}}

    def OrganizationCoreWeaveOrganizationID(self, v):
        return {"entity": {"organization": None}}

    def ArtifactType(self, v):
        return {"project": {"artifact": None}}

    def ServerFeaturesQuery(self, v):
        return {"serverInfo": {"features": []}}

    def CreateRunFiles(self, v):
        files = [{"name": name, "uploadUrl": f"{self.url}/{v['run']}/{name}"}
                 for name in v["files"]]
        return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}

    def CreateArtifact(self, v):
        self.artifacts.append(v["input"])
        return {"createArtifact": {"artifact": {
            "id": f"A{len(self.artifacts) - 1}", "state": "PENDING",
            "artifactSequence": {"latestArtifact": None}}}}

    def manifest(self, artifact):
        file = {"id": "F", "name": "wandb_manifest.json", "displayName": "wandb_manifest.json",
                "uploadHeaders": [], "uploadUrl": f"{self.url}/{artifact}/wandb_manifest.json"}
        return {"artifactManifest": {"id": artifact, "file": file}}

    def CreateArtifactManifest(self, v):
        return {"createArtifactManifest": self.manifest(v["artifactID"])}

    def UpdateArtifactManifest(self, v):
        return {"updateArtifactManifest": self.manifest(v["artifactManifestID"])}

    def CreateArtifactFiles(self, v):
        nodes = [{"node": {
            "storagePath": f["name"], "uploadUrl": f"{self.url}/{f['artifactID']}/{f['name']}",
            "uploadHeaders": [], "uploadMultipartUrls": None, "artifact": {"id": f["artifactID"]}}}
            for f in v["input"]["artifactFiles"]]
        return {"createArtifactFiles": {"files": {"edges": nodes}}}

    def CommitArtifact(self, v):
        self.artifacts[int(v["artifactID"][1:])]["committed"] = True
        return {"commitArtifact": {"artifact": {"id": v["artifactID"], "digest": "d"}}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def parse_request(self):
        """
        Parse a request to the server, or to it as the proxy of http://wandb.test, which a client
        asks for whole addresses.
        """
        parsed = super().parse_request()
        if parsed and self.path.startswith("http://wandb.test/"):
            self.path, self.server.proxied = self.path.removeprefix("http://wandb.test"), True
        return parsed

    def log_message(self, *args):
        pass

    def body(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    def is_faulty(self):
        return self.server.fault is not None and self.server.faulty in self.path

    def answer(self, value):
        fault = self.server.fault if self.is_faulty() else None
        data = (fault if isinstance(fault, bytes)
                else json.dumps({"errors": ["no"]} if fault else value).encode())
        self.send_response(fault if isinstance(fault, int) else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self):
        if self.is_faulty():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return self.answer({})
        parts, length = [], int(self.headers.get("Content-Length") or 0)
        while (left := length - sum(map(len, parts))) > 0:
            time.sleep(min(left, 1 << 16) / self.server.speed if self.server.speed
                       else 3600 * (self.server.speed == 0))
            parts.append(self.rfile.read(min(left, 1 << 16)))
        self.server.uploads[self.path[1:]] = b"".join(parts)
        self.answer({})

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        data = self.body()
        if self.is_faulty():
            return self.answer({})
        kind, _, credentials = self.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            self.server.keys.add(base64.b64decode(credentials).decode().partition(":")[2])
        if self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(data))
            return self.answer({"exitcode": None, "limits": {}})
        if self.path != "/graphql":  # the client's telemetry about itself
            return self.answer({})
        request = json.loads(data)
        operation = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
        self.server.operations.append(operation)
        self.answer({"data": self.server.graphql(operation, request.get("variables") or {})})
