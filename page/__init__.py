"""
The page. page.py joins its parts; a part may import those above it.

    server     HTTP for one user: routes, token, limits
    programs   programs whose output a request waits for
    system     the load of this machine
    state      the user's folder: queue, notes
    locks      which trainers and jobs are alive
    command    from the form to the command line of train.py or sweep.py
    runs       the runs below a folder, read as they grow
    run_api    routes about runs: table, curves, live events
    jobs       the queue of trainings
    talk       models behind OpenAI's API
    inside     what a checkpoint computes for a text

In the browser: app.js is the frame; compare.js (Runs), follow.js (one run), start.js, talk.js and
inside.js (with look.js) each draw a view with dom.js and charts.js. zh.json has the Chinese texts.
"""
