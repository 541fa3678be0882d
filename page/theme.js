// Apply the stored theme. A classic script in the head, unlike a module, runs before the first paint.
const theme = localStorage.getItem("theme")
if (theme) document.documentElement.dataset.theme = theme
