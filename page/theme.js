// Apply the stored theme. A classic script runs before the first paint; a module might run later.
const theme = localStorage.getItem("theme")
if (theme) document.documentElement.dataset.theme = theme
