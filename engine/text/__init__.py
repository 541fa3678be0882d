"""
Convert text to tokens. No module imports one that is further down this list:

    blocks        read UTF-8 files block by block; the errors of files without text
    encodings     detect the encoding of bytes
    conversations records of conversations
    tables        .csv, .tsv, .parquet, .json and .jsonl
    readers       convert any file to UTF-8
    stories       the built-in stories
    questions     questions about the stories, with answers
    pairs         minimal pairs from the stories: a right and a wrong text
    downloads     texts that are downloaded
    sources       the sources that --data may name; add a module there for a source of your own
    corpus        where the documents of a source are
    prepared      the prepared folder and its checks
    vocabulary    train a vocabulary on a text, or load one
    encode        encode documents to token ids, with worker processes
    prepare       make a prepared folder of a source
    packing       pack conversations into rows of one length
    survey        statistics of a prepared text

May import engine.formats, engine.tracking, tokenizer.py, configurator.py and the modules of engine
itself (files, streams, untrusted, advice, system); never engine.training or engine.debug.
"""
