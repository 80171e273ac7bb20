"""Results as a person sees them: a table, a page, figures, a card. It trains nothing and decides nothing.

`table.PhotoTable`           what a model says of photos: CSV, JSON lines, a data frame
`html.write_report`          the page of a discovery, one file that opens offline
`figures.embedding_figure`   the embedding and the novelty score as a picture
`card.model_card`            the README of a saved model
"""
