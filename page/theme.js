// The theme that the reader chose. A script of its own, so that it is set before the first paint.
const theme = localStorage.getItem("theme")
if (theme) document.documentElement.dataset.theme = theme
