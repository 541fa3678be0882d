"""
The modules of the page, which page.py joins. Each may import the ones above it in this list.

    server     HTTP server for one user: routes, token, limits
    programs   runs programs whose output a request waits for
    system     measures the load of this machine
    state      the folder where the page keeps the user's queue and notes
    locks      finds out which trainers and jobs are alive
    command    turns a form into a command line of train.py or sweep.py
    runs       finds the runs below a folder, and reads them as they grow
    run_api    routes about runs: table, curves, live events
    jobs       the queue of trainings
    scheduler  generates the texts of many clients at once
    talk       answers from models through OpenAI's API
    embeddings embeddings of texts through OpenAI's API
    inside     computes what happens inside a checkpoint for a text

In the browser, app.js chooses the view. Each view has a file, which draws with dom.js and
charts.js: compare.js (Runs), follow.js (one run), start.js, talk.js, and inside.js with look.js.
zh.json holds the Chinese texts.
"""
